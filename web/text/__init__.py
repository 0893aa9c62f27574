"""Text: tokenising, chat templates, detokenising, stop strings. Knows neither HTTP nor the worker."""
