"""Wire models, digests, Arrow schemas, epoch arithmetic and the error tree."""
