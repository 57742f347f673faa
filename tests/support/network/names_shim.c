/* Names that a test adds and removes while processes run: LD_PRELOAD=names_shim.so NAMES_SHIM_FILE=FILE.

   Each line of the file is NAME ADDRESS; it is read at each question. A name that ends in .test and is not in
   the file does not resolve. All other names go to the C library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int address_of(const char *name, char *address) {
  const char *path = getenv("NAMES_SHIM_FILE");
  FILE *file = path ? fopen(path, "re") : NULL;
  char known[256];
  int found = 0;
  while (file && !found && fscanf(file, "%255s %63s", known, address) == 2) found = !strcmp(known, name);
  if (file) fclose(file);
  return found;
}

int getaddrinfo(const char *restrict node, const char *restrict service,
                const struct addrinfo *restrict hints, struct addrinfo **restrict result) {
  static __typeof__(&getaddrinfo) next;
  if (!next) next = (__typeof__(next))dlsym(RTLD_NEXT, "getaddrinfo");
  size_t length = node ? strlen(node) : 0;
  if (length < 5 || strcmp(node + length - 5, ".test")) return next(node, service, hints, result);
  char address[64];
  if (!address_of(node, address)) return EAI_NONAME;
  return next(address, service, hints, result);
}
