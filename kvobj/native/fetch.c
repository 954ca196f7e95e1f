/* A whole GET in one call: signed, sent, its answer received into the caller's memory. See kvobj/client/native_fetch.py, the one user.
 *
 * Only the plain case ends here: HTTP/1.1 200 of a kvobj server, with one Content-Length that fits the memory. Every other answer is
 * handed back as it came, for the reader that knows all of them; nothing is guessed at, and a head that this one takes is one that
 * the other would read alike (kvobj/wire/response_head.py).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))
#define HEX_BYTES 64
#define FIELDS_MAX 256
#define LENGTH_DIGITS_MAX 18
#define TEXT_BYTES 512
#define PART_BYTES 2048
#define REQUEST_BYTES 8192
#define SECONDS_MAX 1e6 /* eleven days: its milliseconds fit an int */

/* -- SHA-256: FIPS 180-4 -- */

typedef struct {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} sha256_t;

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t BEGINNING[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

static uint32_t read_be(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_be(unsigned char *at, uint32_t x) {
    at[0] = (unsigned char)(x >> 24), at[1] = (unsigned char)(x >> 16), at[2] = (unsigned char)(x >> 8), at[3] = (unsigned char)x;
}

static void compress(uint32_t state[8], const unsigned char *block) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) w[i] = read_be(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t low = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t high = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t high = turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25);
        uint32_t chosen = (s[4] & s[5]) ^ (~s[4] & s[6]);
        uint32_t one = s[7] + high + chosen + K[i] + w[i];
        uint32_t low = turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22);
        uint32_t two = low + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += one;
        s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

static void add(sha256_t *sha, const void *data, size_t size) {
    const unsigned char *from = data;
    while (size) {
        size_t held = sha->bytes % 64, count = 64 - held < size ? 64 - held : size;
        memcpy(sha->block + held, from, count);
        sha->bytes += count, from += count, size -= count;
        if (sha->bytes % 64 == 0) compress(sha->state, sha->block);
    }
}

static void finish(sha256_t *sha, unsigned char digest[32]) {
    uint64_t bits = sha->bytes * 8;
    unsigned char tail[72] = {0x80};
    size_t count = 64 - (sha->bytes + 8) % 64;
    write_be(tail + count, (uint32_t)(bits >> 32));
    write_be(tail + count + 4, (uint32_t)bits);
    add(sha, tail, count + 8);
    for (int i = 0; i < 8; i++) write_be(digest + 4 * i, sha->state[i]);
}

static void as_hex(const unsigned char digest[32], char hex[HEX_BYTES]) {
    for (int i = 0; i < 32; i++) {
        hex[2 * i] = "0123456789abcdef"[digest[i] >> 4];
        hex[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
    }
}

/* -- Signing -- */

/* What all requests of a second with the same fields have in common; laid out by nobody but this file. */
typedef struct {
    sha256_t inner, outer; /* HMAC-SHA256 (RFC 2104), the key's block taken in */
    uint32_t fields_bytes, canonical_bytes, text_bytes;
    char fields[PART_BYTES], canonical[PART_BYTES], text[TEXT_BYTES];
} frame_t;

EXPORTED uint64_t kvobj_fetch_frame_bytes(void) { return sizeof(frame_t); }

/* Make a frame: `fields` up to the signature, `canonical` behind the query of the canonical request, `text` before its hash. False
 * where one does not fit. */
EXPORTED int kvobj_fetch_frame(frame_t *frame, const unsigned char *key, uint64_t key_bytes, const char *fields, uint64_t fields_bytes,
                               const char *canonical, uint64_t canonical_bytes, const char *text, uint64_t text_bytes) {
    if (key_bytes > 64 || fields_bytes > PART_BYTES || canonical_bytes > PART_BYTES || text_bytes > TEXT_BYTES) return 0;
    unsigned char inner[64], outer[64];
    for (uint64_t i = 0; i < 64; i++) {
        unsigned char byte = i < key_bytes ? key[i] : 0;
        inner[i] = byte ^ 0x36, outer[i] = byte ^ 0x5c;
    }
    memcpy(frame->inner.state, BEGINNING, sizeof BEGINNING);
    memcpy(frame->outer.state, BEGINNING, sizeof BEGINNING);
    frame->inner.bytes = frame->outer.bytes = 0;
    add(&frame->inner, inner, sizeof inner);
    add(&frame->outer, outer, sizeof outer);
    memcpy(frame->fields, fields, frame->fields_bytes = (uint32_t)fields_bytes);
    memcpy(frame->canonical, canonical, frame->canonical_bytes = (uint32_t)canonical_bytes);
    memcpy(frame->text, text, frame->text_bytes = (uint32_t)text_bytes);
    return 1;
}

static void sign(const frame_t *frame, const char *path, size_t path_bytes, char signature[HEX_BYTES]) {
    unsigned char digest[32];
    char hex[HEX_BYTES];
    sha256_t sha = {.bytes = 0};
    memcpy(sha.state, BEGINNING, sizeof BEGINNING);
    add(&sha, "GET\n", 4);
    add(&sha, path, path_bytes);
    add(&sha, "\n\n", 2);
    add(&sha, frame->canonical, frame->canonical_bytes);
    finish(&sha, digest);
    as_hex(digest, hex);
    sha = frame->inner;
    add(&sha, frame->text, frame->text_bytes);
    add(&sha, hex, sizeof hex);
    finish(&sha, digest);
    sha = frame->outer;
    add(&sha, digest, sizeof digest);
    finish(&sha, digest);
    as_hex(digest, signature);
}

/* -- The exchange -- */

enum { UNFIT = -1, STALE = -2, HANDED = -3, INTERRUPTED = -4, BROKEN_HEAD = -5, BROKEN_BODY = -6, TIMED_OUT = -7 };

typedef struct {
    /* Read by the owner, as native_fetch.py lays it out. */
    uint64_t came;      /* bytes in the stash, from its beginning */
    uint64_t digest_at; /* in the stash: X-Kvobj-Digest; 0: there is none */
    int64_t error;      /* errno; 0: the peer sends no more */
    /* The call's own. */
    int fd;
    bool is_begun; /* the head has been read */
    bool is_told;  /* it has the field that every answer of a kvobj server has (http_chunks.py): it is no other's page */
    int64_t deadline_ns, patience_ns;
    unsigned char *stash, *room;
    uint64_t stash_bytes, room_bytes, filled, length, request_bytes, sent;
    char request[REQUEST_BYTES];
} fetch_t;

EXPORTED uint64_t kvobj_fetch_bytes(void) { return sizeof(fetch_t); }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool is_plain(unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '-' && c <= '9') || c == '_' || c == '~'; /* - . / and digits */
}

static bool is_token(unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_named(const unsigned char *name, size_t size, const char *wanted) {
    for (size_t i = 0; i < size; i++) {
        unsigned char c = name[i];
        if ((c >= 'A' && c <= 'Z' ? c + 32 : c) != (unsigned char)wanted[i]) return false; /* a shorter wanted has its NUL here */
    }
    return !wanted[size];
}

static bool is_hex(unsigned char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

/* Whether a field is one that the plain case may have; the length and the digest are taken from theirs. */
static bool take_field(fetch_t *f, const unsigned char *name, size_t name_bytes, const unsigned char *value, const unsigned char *end,
                       bool *has_length) {
    while (value < end && (*value == ' ' || *value == '\t')) value++;
    while (value < end && (end[-1] == ' ' || end[-1] == '\t')) end--;
    size_t size = (size_t)(end - value);
    if (is_named(name, name_bytes, "content-length")) {
        if (*has_length || !size || size > LENGTH_DIGITS_MAX) return false;
        for (*has_length = true; value < end; value++) {
            if (*value < '0' || *value > '9') return false;
            f->length = f->length * 10 + (*value - '0');
        }
    } else if (is_named(name, name_bytes, "x-kvobj-digest")) {
        if (f->digest_at || size != HEX_BYTES) return false;
        for (size_t i = 0; i < size; i++) {
            if (!is_hex(value[i])) return false;
        }
        f->digest_at = (uint64_t)(value - f->stash);
    } else if (is_named(name, name_bytes, "x-amz-request-id")) {
        f->is_told = true;
    } else {
        return !is_named(name, name_bytes, "transfer-encoding") && !is_named(name, name_bytes, "connection");
    }
    return true;
}

/* Read the head that ends at `end` with its last line's CRLF; whether it is the plain one. */
static bool take_head(fetch_t *f, const unsigned char *end) {
    static const char OK[] = "HTTP/1.1 200";
    const unsigned char *at = f->stash;
    bool has_length = false;
    f->length = f->digest_at = 0, f->is_told = false;
    for (int number = 0; at < end; number++) {
        const unsigned char *stop = at, *colon = NULL;
        for (; *stop != '\r'; stop++) {
            if (*stop == '\n' || !*stop) return false;
            if (*stop == ':' && !colon) colon = stop;
        }
        if (stop[1] != '\n' || number >= FIELDS_MAX) return false;
        if (!number) {
            size_t size = (size_t)(stop - at);
            if (size < sizeof OK - 1 || memcmp(at, OK, sizeof OK - 1) || (size > sizeof OK - 1 && at[sizeof OK - 1] != ' ')) return false;
        } else {
            if (!colon || colon == at) return false;
            for (const unsigned char *c = at; c < colon; c++) {
                if (!is_token(*c)) return false;
            }
            if (!take_field(f, at, (size_t)(colon - at), colon + 1, stop, &has_length)) return false;
        }
        at = stop + 2;
    }
    return has_length && f->is_told;
}

/* What a call ends with that failed: `broken` unless it can go on or took too long. */
static int64_t failed(fetch_t *f, int64_t broken) {
    f->error = errno;
    return errno == EINTR ? INTERRUPTED : errno == EAGAIN || errno == EWOULDBLOCK ? TIMED_OUT : broken;
}

/* Bytes received; 0 with `*told` set: what the call ends with. */
static uint64_t receive(fetch_t *f, unsigned char *into, uint64_t size, int64_t broken, int64_t *told) {
    int64_t left_ns = f->deadline_ns - now_ns();
    if (left_ns < f->patience_ns) { /* the socket's own timeout is too long by now */
        struct pollfd wait = {.fd = f->fd, .events = POLLIN};
        int ready = left_ns > 0 ? poll(&wait, 1, (int)(left_ns / 1000000) + 1) : 0;
        if (ready <= 0) {
            *told = ready ? failed(f, broken) : TIMED_OUT;
            return 0;
        }
    }
    ssize_t count = recv(f->fd, into, size, 0);
    if (count > 0) return (uint64_t)count;
    *told = count ? failed(f, broken) : broken;
    return 0;
}

static int64_t go_on(fetch_t *f) {
    int64_t told = 0;
    while (f->sent < f->request_bytes) {
        ssize_t count = send(f->fd, f->request + f->sent, f->request_bytes - f->sent, MSG_NOSIGNAL);
        if (count < 0) return failed(f, BROKEN_HEAD);
        f->sent += (uint64_t)count;
    }
    while (!f->is_begun) {
        uint64_t count = receive(f, f->stash + f->came, f->stash_bytes - f->came, BROKEN_HEAD, &told);
        if (!count) return told == BROKEN_HEAD && f->came && !f->error ? HANDED : told; /* its reader finds the end, too */
        uint64_t searched = f->came > 3 ? f->came - 3 : 0;
        f->came += count;
        unsigned char *end = memmem(f->stash + searched, f->came - searched, "\r\n\r\n", 4);
        if (!end) {
            if (f->came == f->stash_bytes) return HANDED;
            continue;
        }
        uint64_t ahead = f->came - (uint64_t)(end + 4 - f->stash);
        if (!take_head(f, end + 2) || f->length > f->room_bytes || ahead > f->length) return HANDED;
        f->is_begun = true;
        memcpy(f->room, end + 4, ahead);
        f->filled = ahead;
    }
    while (f->filled < f->length) {
        uint64_t count = receive(f, f->room + f->filled, f->length - f->filled, BROKEN_BODY, &told);
        if (!count) return told;
        f->filled += count;
    }
    return (int64_t)f->length;
}

/* Make ready for the fetches of a connection: `stash` is where the front of an answer goes, and stays the owner's. */
EXPORTED void kvobj_fetch_ready(fetch_t *f, int fd, unsigned char *stash, uint64_t stash_bytes) {
    f->fd = fd, f->stash = stash, f->stash_bytes = stash_bytes;
}

/* GET `path`, with the deadline so many seconds from now; the socket blocks, with timeouts of its own of `timeout` seconds, which
 * are as long or a little longer. How many bytes of the room were filled, or one of the codes above. UNFIT: nothing was sent, and
 * STALE: something had come that nobody had asked for. HANDED: `came` bytes of the answer lie in the stash, and no more of it has been
 * received. INTERRUPTED: go on with `kvobj_fetch_on`, once signals have been seen to. BROKEN_HEAD, BROKEN_BODY: the connection failed
 * (`error`) or ended, before or behind the head's end. */
EXPORTED int64_t kvobj_fetch(fetch_t *f, const frame_t *frame, const char *path, uint64_t path_bytes, unsigned char *room,
                             uint64_t room_bytes, double seconds, double timeout) {
    static const char BEFORE[] = "GET ", BEHIND[] = " HTTP/1.1\r\n", END[] = "\r\n\r\n";
    uint64_t needed = sizeof BEFORE + path_bytes + sizeof BEHIND + frame->fields_bytes + HEX_BYTES + sizeof END;
    if (path_bytes > REQUEST_BYTES || needed > REQUEST_BYTES) return UNFIT;
    for (uint64_t i = 0; i < path_bytes; i++) {
        if (!is_plain((unsigned char)path[i])) return UNFIT;
    }
    unsigned char unasked;
    if (recv(f->fd, &unasked, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return STALE;
    char *to = f->request;
    to = mempcpy(to, BEFORE, sizeof BEFORE - 1);
    to = mempcpy(to, path, path_bytes);
    to = mempcpy(to, BEHIND, sizeof BEHIND - 1);
    to = mempcpy(to, frame->fields, frame->fields_bytes);
    sign(frame, path, path_bytes, to);
    to = mempcpy(to + HEX_BYTES, END, sizeof END - 1);
    f->request_bytes = (uint64_t)(to - f->request);
    f->room = room, f->room_bytes = room_bytes;
    f->came = f->digest_at = f->filled = f->sent = 0, f->error = 0, f->is_begun = false;
    if (seconds > SECONDS_MAX) seconds = SECONDS_MAX;
    if (timeout > SECONDS_MAX) timeout = SECONDS_MAX;
    f->deadline_ns = now_ns() + (int64_t)(seconds * 1e9);
    f->patience_ns = (int64_t)(timeout * 0.9e9);
    return go_on(f);
}

/* Go on with a call that was INTERRUPTED. */
EXPORTED int64_t kvobj_fetch_on(fetch_t *f) {
    f->error = 0; /* it was the signal's */
    return go_on(f);
}
