// How many blocks a persistent kernel has at most.
#pragma once

namespace rose {

// Build with -DROSE_BLOCKS=2 for racecheck: a persistent kernel has so many blocks at most. Each then takes many items,
// also where a check can afford only a few, and comes round to every stage of its rings again and again.
inline int most_blocks(int blocks) {
#ifdef ROSE_BLOCKS
  return blocks < ROSE_BLOCKS ? blocks : ROSE_BLOCKS;
#else
  return blocks;
#endif
}

}  // namespace rose
