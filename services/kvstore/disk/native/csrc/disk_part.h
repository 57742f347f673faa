/* One block to read: its place, its destination and its expected checksum. The event loop packs this struct. */
#ifndef SLIPSTREAM_DISK_PART_H
#define SLIPSTREAM_DISK_PART_H

#include "disk_base.h"

#include <string.h>
#include <sys/uio.h>

#define FOLLOWED 1u /* the next part is its neighbour in the same run */
#define DIRECT 2u   /* the file is open for direct I/O */
#define MISMATCH 1

typedef struct {
    uint64_t id;
    int32_t fd;
    uint32_t flags;
    int64_t offset;
    uint64_t n_bytes; /* of the slot */
    uint64_t address;
    uint64_t hash_bytes;  /* length of the payload, which the checksum covers */
    uint8_t expected[16]; /* xxh3-128, big-endian */
} part;

/* Returns 0 or -errno. */
static inline int64_t move(const part *first, const struct iovec *views, int n_views, uint64_t expected) {
    ssize_t moved;
    do
        moved = preadv(first->fd, views, n_views, first->offset);
    while (moved < 0 && errno == EINTR);
    if (moved < 0) return -errno;
    return moved == (ssize_t)expected ? 0 : -EIO;
}

/* Returns 0 or MISMATCH. */
static inline int64_t compared(hash128 sum, const part *read) {
    uint8_t found[16];
    big_endian(sum, found);
    return memcmp(found, read->expected, 16) ? MISMATCH : 0;
}

static inline int64_t verified(const hashes *hash, const part *read) {
    const void *payload = (const void *)(uintptr_t)read->address;
    return compared(hash->whole(payload, read->hash_bytes, hash->secret, hash->secret_bytes), read);
}

#endif
