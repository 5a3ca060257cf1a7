"""The reference network, in torch's operations: it runs wherever torch does, on CPUs and on GPUs."""
