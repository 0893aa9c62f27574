"""What clients may send: one declarative schema for each endpoint. Knows neither HTTP nor the worker."""
