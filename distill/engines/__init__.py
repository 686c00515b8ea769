"""Engines in processes of their own: how one is started, asked and stopped, for recording and for `mode=served`;
and the HTTP client of all that asks a server."""
