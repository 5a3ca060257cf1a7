"""Lines about settled requests, for billing: written to a file, and posted to a webhook."""
