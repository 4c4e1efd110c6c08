// Bytes that torch's caching allocator has handed out on a GPU: now, in all so far, and the most at once.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

// Waits for the allocator's lock. Throws what the allocator throws.
inline c10::CachingAllocator::Stat allocated_bytes(c10::DeviceIndex device) {
  const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device);
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}
