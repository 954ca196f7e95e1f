// Put in front of the kernels when they are built under AddressSanitizer: GCC does not check what masked loads and stores and gathers
// of AVX2 and AVX-512 touch, so each of them asks the sanitizer first. Masks are those of consecutive elements from the first on.
#if defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>

extern "C" void __asan_loadN(const void*, size_t);
extern "C" void __asan_storeN(void*, size_t);

static inline size_t fuzz_bytes(unsigned long long mask, size_t element) { return mask ? (64 - __builtin_clzll(mask)) * element : 0; }
static inline void fuzz_load(const void* p, size_t bytes) { if (bytes) __asan_loadN(p, bytes); }
static inline void fuzz_store(void* p, size_t bytes) { if (bytes) __asan_storeN(p, bytes); }
template <class Vector> static inline void fuzz_gather(const void* table, Vector index) {
    int each[sizeof(Vector) / 4];
    __builtin_memcpy(each, &index, sizeof index);
    for (int at : each) __asan_loadN((const char*)table + 4 * (long long)at, 4);
}

#if defined(__AVX2__)
#define _mm256_i32gather_epi32(table, index, scale) (fuzz_gather(table, index), _mm256_i32gather_epi32(table, index, scale))
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define _mm512_mask_i32gather_epi32(none, mask, index, table, scale) \
    (fuzz_gather(table, index), _mm512_mask_i32gather_epi32(none, mask, index, table, scale))
#define _mm512_maskz_loadu_epi16(mask, p) (fuzz_load(p, fuzz_bytes(mask, 2)), _mm512_maskz_loadu_epi16(mask, p))
#define _mm512_maskz_loadu_epi8(mask, p) (fuzz_load(p, fuzz_bytes(mask, 1)), _mm512_maskz_loadu_epi8(mask, p))
#define _mm256_maskz_loadu_epi8(mask, p) (fuzz_load(p, fuzz_bytes(mask, 1)), _mm256_maskz_loadu_epi8(mask, p))
#define _mm512_mask_storeu_epi16(p, mask, x) (fuzz_store(p, fuzz_bytes(mask, 2)), _mm512_mask_storeu_epi16(p, mask, x))
#define _mm512_mask_storeu_epi8(p, mask, x) (fuzz_store(p, fuzz_bytes(mask, 1)), _mm512_mask_storeu_epi8(p, mask, x))
#define _mm256_mask_storeu_epi8(p, mask, x) (fuzz_store(p, fuzz_bytes(mask, 1)), _mm256_mask_storeu_epi8(p, mask, x))
#endif
#endif
