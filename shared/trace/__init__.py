"""One request, one picture: what both services' logs say about a request, put together.

    reading (lines of a log -> typed lines) -> join (typed lines -> requests) -> table (requests -> text)

Logs are not trusted: any process may have written a line, and callers choose the ids. Whatever is read is
held to the schema of `shared.completed_line` and bounded, and nothing but printable text comes out.
"""
