"""The connections to Redis: one server, a primary that Sentinels name, or a Cluster."""
