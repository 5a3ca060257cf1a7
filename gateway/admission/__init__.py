"""Admission: a request's fields, its weight, and its caller's quotas."""
