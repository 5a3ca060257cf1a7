"""The Helm chart, what compose.yaml mounts, and in `make` what makes their files."""
