"""The pages of the KV cache, on the device, in host memory and on disk, and the prefix cache that they
make."""
