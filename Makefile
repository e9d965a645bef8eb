install:
	@sh scripts/bootstrap.sh install
lock:
	@sh scripts/bootstrap.sh lock
