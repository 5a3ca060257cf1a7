"""The API process tells of its work here: metrics, and the causes of waits."""
