"""The APIs: for each its request, its answers and its errors, as both services read and write them."""
