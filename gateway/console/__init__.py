"""The console: a page on the admin listener, and what it needs beside the operators' API."""
