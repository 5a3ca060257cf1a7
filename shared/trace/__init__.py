"""The trace of one request: its completed lines in both services' logs, put together.

    reading (lines of a log -> typed lines) -> join (typed lines -> requests) -> table (requests -> text)

Logs are not trusted: any process may have written a line, and callers choose the ids. Every line is checked
against the schema of `shared.wire.completed_line` and bounded, and the output is printable text alone.
"""
