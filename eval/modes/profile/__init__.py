"""`mode=profile`: where the time of a round goes, and whether it goes elsewhere than in an earlier checkout."""
