"""The endpoints that engines serve behind the gateway: a module for each API, and what all of them share."""
