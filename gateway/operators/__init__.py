"""The admin listener: what operators may ask and change, and how they log in."""
