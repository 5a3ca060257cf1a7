"""What tenants share, and how: room, threads, turns of an event loop."""
