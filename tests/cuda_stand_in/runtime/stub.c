// What every symbol of a stub library does: name itself and fail. Version and error-text functions answer something harmless,
// because torch asks for them as it loads.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((visibility("hidden"))) long standin_stub(const char* name, const char** text) {
  const char* log = getenv("CUDA_STAND_IN_LOG");
  if (strstr(name, "ResultString")) {  // CUPTI's: the text is its second argument
    *text = "a function of a stub library was called";
    return 0;
  }
  if (strstr(name, "Version")) return strstr(name, "cudnn") ? 91900 : 0;
  if (strstr(name, "ErrorString") || strstr(name, "StatusName") || strstr(name, "LastError")) {
    return (long)"a function of a stub library was called";
  }
  if (log && atol(log) >= 1) fprintf(stderr, "CUDA stand-in: %s of the stub %s was called\n", name, LIBRARY);
  return 1;
}
