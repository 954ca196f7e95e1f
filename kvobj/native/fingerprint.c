/* What this library was made from (build.py), so that a stale one is told apart. */
#ifndef KVOBJ_NATIVE_FINGERPRINT
#define KVOBJ_NATIVE_FINGERPRINT "unknown"
#endif

__attribute__((visibility("default"))) const char *kvobj_native_fingerprint(void) { return KVOBJ_NATIVE_FINGERPRINT; }
