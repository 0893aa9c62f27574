"""The HTTP side: a Flask application under Gunicorn. Text lives here; torch and worker are never imported."""
