# Have llama.py build llama.cpp as it was asked for here, and include the targets it names.
get_cmake_property(cache_variables CACHE_VARIABLES)
foreach(variable IN LISTS cache_variables)
  if(variable MATCHES "^GGML_")
    list(APPEND arguments --define "${variable}=${${variable}}")
  endif()
endforeach()
if(BMOE_LLAMA_DIR)
  list(APPEND arguments --source "${BMOE_LLAMA_DIR}")
endif()
if(BMOE_SANITIZE AND BMOE_SANITIZE_LLAMA)
  set(flags "-fsanitize=${BMOE_SANITIZE} -fno-omit-frame-pointer -g")
  list(APPEND arguments --define "CMAKE_C_FLAGS=${flags}" --define "CMAKE_CXX_FLAGS=${flags}")
endif()

string(STRIP "${CMAKE_C_COMPILER} ${CMAKE_C_COMPILER_ARG1}" cc)
string(STRIP "${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_ARG1}" cxx)
# Compilers for llama.cpp other than ours, so that the one that is there need not be built again.
set(BMOE_LLAMA_CC "${cc}" CACHE STRING "C compiler for llama.cpp")
set(BMOE_LLAMA_CXX "${cxx}" CACHE STRING "C++ compiler for llama.cpp")
get_filename_component(cmake_directory "${CMAKE_COMMAND}" DIRECTORY)
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env "CC=${BMOE_LLAMA_CC}" "CXX=${BMOE_LLAMA_CXX}" "PATH=$ENV{PATH}:${cmake_directory}"
          "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/llama.py" ${arguments}
  OUTPUT_VARIABLE llama_targets OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE llama_result)
if(NOT llama_result EQUAL 0)
  message(FATAL_ERROR "llama.cpp could not be had; the reason is above.")
endif()
include("${llama_targets}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  "${llama_targets}" "${CMAKE_CURRENT_LIST_DIR}/llama.py" "${CMAKE_CURRENT_LIST_DIR}/llama/CMakeLists.txt")
