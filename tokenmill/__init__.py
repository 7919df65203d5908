"""What users import and type: the stream reader, the client, the command line, the supervisor."""
