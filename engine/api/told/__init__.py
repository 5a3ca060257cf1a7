"""What the API process tells of its work: metrics, and the causes of waits."""
