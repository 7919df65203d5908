"""The HTTP server: connections, request parsing, deadlines and limits. It knows no route."""
