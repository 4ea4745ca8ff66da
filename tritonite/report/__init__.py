"""What ran where, and why: before a call (explain) and after it (report).

- explain: which kernel or which reason to decline a call would meet
- report: the operators of a function's calls, by who served them
- stats: the counts of calls served and declined, as a table
"""
