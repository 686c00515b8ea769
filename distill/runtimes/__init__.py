"""What runs a target for records: transformers in this process, vLLM in one of its own, or a server that speaks
OpenAI's protocol; what they ask over HTTP, and again after which status, is `distill/engines/http_client.py`."""
