// Products with A in registers, as wgmma_fp8_registers.cuh has them, for the widths of prefill_wide.cuh.
// Kept apart so that a test can put a model of the machine in its place.
#pragma once

#include "wgmma_fp8.cuh"

namespace rose::moe::wide {

// clang-format off
#define ROSE_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ROSE_NAMES0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ROSE_NAMES1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define ROSE_NAMES2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define ROSE_NAMES3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define ROSE_NAMES4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define ROSE_NAMES5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define ROSE_NAMES6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define ROSE_NAMES7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define ROSE_NAMES8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define ROSE_NAMES9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define ROSE_NAMES10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define ROSE_NAMES11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define ROSE_NAMES12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define ROSE_NAMES13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define ROSE_NAMES14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define ROSE_NAMES15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define ROSE_LIST2 ROSE_NAMES0 ", " ROSE_NAMES1
#define ROSE_LIST4 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3
#define ROSE_LIST5 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4
#define ROSE_LIST6 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5
#define ROSE_LIST7 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6
#define ROSE_LIST8 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7
#define ROSE_LIST9 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8
#define ROSE_LIST10 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9
#define ROSE_LIST11 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9 ", " ROSE_NAMES10
#define ROSE_LIST12 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9 ", " ROSE_NAMES10 ", " ROSE_NAMES11
#define ROSE_LIST13 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9 ", " ROSE_NAMES10 ", " ROSE_NAMES11 ", " ROSE_NAMES12
#define ROSE_LIST14 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9 ", " ROSE_NAMES10 ", " ROSE_NAMES11 ", " ROSE_NAMES12 ", " ROSE_NAMES13
#define ROSE_LIST15 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9 ", " ROSE_NAMES10 ", " ROSE_NAMES11 ", " ROSE_NAMES12 ", " ROSE_NAMES13 ", " ROSE_NAMES14
#define ROSE_LIST16 ROSE_NAMES0 ", " ROSE_NAMES1 ", " ROSE_NAMES2 ", " ROSE_NAMES3 ", " ROSE_NAMES4 ", " ROSE_NAMES5 ", " ROSE_NAMES6 ", " ROSE_NAMES7 ", " ROSE_NAMES8 ", " ROSE_NAMES9 ", " ROSE_NAMES10 ", " ROSE_NAMES11 ", " ROSE_NAMES12 ", " ROSE_NAMES13 ", " ROSE_NAMES14 ", " ROSE_NAMES15
#define ROSE_SUMS2 ROSE_8(0), ROSE_8(8)
#define ROSE_SUMS4 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24)
#define ROSE_SUMS5 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32)
#define ROSE_SUMS6 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40)
#define ROSE_SUMS7 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48)
#define ROSE_SUMS8 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56)
#define ROSE_SUMS9 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64)
#define ROSE_SUMS10 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72)
#define ROSE_SUMS11 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72), ROSE_8(80)
#define ROSE_SUMS12 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72), ROSE_8(80), ROSE_8(88)
#define ROSE_SUMS13 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72), ROSE_8(80), ROSE_8(88), ROSE_8(96)
#define ROSE_SUMS14 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72), ROSE_8(80), ROSE_8(88), ROSE_8(96), ROSE_8(104)
#define ROSE_SUMS15 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72), ROSE_8(80), ROSE_8(88), ROSE_8(96), ROSE_8(104), ROSE_8(112)
#define ROSE_SUMS16 ROSE_8(0), ROSE_8(8), ROSE_8(16), ROSE_8(24), ROSE_8(32), ROSE_8(40), ROSE_8(48), ROSE_8(56), ROSE_8(64), ROSE_8(72), ROSE_8(80), ROSE_8(88), ROSE_8(96), ROSE_8(104), ROSE_8(112), ROSE_8(120)
// `names`: a[0] to a[3], the descriptor, whether to add.
#define ROSE_PRODUCT(width, eights, a0, a1, a2, a3, at, add)                                                  \
  if constexpr (kN == width) {                                                                                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #width "k32.f32.e4m3.e4m3 {" ROSE_LIST##eights "}, "      \
                 "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at ", p, 1, 1;\n}"                             \
                 : ROSE_SUMS##eights                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                      \
  }
// clang-format on

// d (+)= A B; accumulate 0 overwrites d.
template <int kN>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(kN % 16 == 0 && kN != 48 && kN >= 32 && kN <= 256, "width without a wrapper");
  ROSE_PRODUCT(32, 2, 16, 17, 18, 19, 20, 21)
  ROSE_PRODUCT(64, 4, 32, 33, 34, 35, 36, 37)
  ROSE_PRODUCT(80, 5, 40, 41, 42, 43, 44, 45)
  ROSE_PRODUCT(96, 6, 48, 49, 50, 51, 52, 53)
  ROSE_PRODUCT(112, 7, 56, 57, 58, 59, 60, 61)
  ROSE_PRODUCT(128, 8, 64, 65, 66, 67, 68, 69)
  ROSE_PRODUCT(144, 9, 72, 73, 74, 75, 76, 77)
  ROSE_PRODUCT(160, 10, 80, 81, 82, 83, 84, 85)
  ROSE_PRODUCT(176, 11, 88, 89, 90, 91, 92, 93)
  ROSE_PRODUCT(192, 12, 96, 97, 98, 99, 100, 101)
  ROSE_PRODUCT(208, 13, 104, 105, 106, 107, 108, 109)
  ROSE_PRODUCT(224, 14, 112, 113, 114, 115, 116, 117)
  ROSE_PRODUCT(240, 15, 120, 121, 122, 123, 124, 125)
  ROSE_PRODUCT(256, 16, 128, 129, 130, 131, 132, 133)
}

#undef ROSE_NAMES0
#undef ROSE_NAMES1
#undef ROSE_NAMES2
#undef ROSE_NAMES3
#undef ROSE_NAMES4
#undef ROSE_NAMES5
#undef ROSE_NAMES6
#undef ROSE_NAMES7
#undef ROSE_NAMES8
#undef ROSE_NAMES9
#undef ROSE_NAMES10
#undef ROSE_NAMES11
#undef ROSE_NAMES12
#undef ROSE_NAMES13
#undef ROSE_NAMES14
#undef ROSE_NAMES15
#undef ROSE_8
#undef ROSE_PRODUCT

}  // namespace rose::moe::wide
