"""The finding of replicas: by DNS, or by the endpoints of a Service in Kubernetes."""
