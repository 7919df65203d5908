"""The OpenAPI document: what flask-openapi3 generates, with errors, events and examples added."""
