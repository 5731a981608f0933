"""What tests share: the server, databases, named sessions, plans."""
