"""A store in a bucket of any service that speaks S3 and supports conditional writes."""
