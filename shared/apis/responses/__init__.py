"""OpenAI's responses: `/v1/responses`, and the count of what one would take."""
