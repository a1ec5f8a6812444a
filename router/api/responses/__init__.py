"""OpenAI's responses API, without any memory of earlier ones."""
