"""The shapes that services and clients send each other: requests, events, errors, ids and reports."""
