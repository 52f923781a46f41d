// prefill_wide_ptx.cuh on the model.
#pragma once

#include "wgmma_fp8_registers.cuh"
