"""Binary search of sorted sequences: searchsorted, bucketize, isin."""
