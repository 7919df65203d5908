"""Request and response bodies (pydantic), and how a task is shown."""
