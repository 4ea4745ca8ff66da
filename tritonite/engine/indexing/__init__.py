"""Elements at computed places: reading, writing and adding up where index tensors tell, and finding what is not 0."""
