# Where things go: into the Python package when a wheel is built, else the usual lib/ and include/.
if(SKBUILD)
  set(library_directory bmoe_native)
  set(header_directory bmoe_native/include)
  set(license_directory bmoe_native/licenses)
else()
  include(GNUInstallDirs)
  set(library_directory "${CMAKE_INSTALL_LIBDIR}")
  set(header_directory "${CMAKE_INSTALL_INCLUDEDIR}")
  set(license_directory "${CMAKE_INSTALL_DOCDIR}")
endif()
set(header "${CMAKE_CURRENT_SOURCE_DIR}/include/bmoe.h")
install(TARGETS bmoe LIBRARY DESTINATION "${library_directory}")
install(FILES "${header}" DESTINATION "${header_directory}")

# libbmoe.so contains what these cover.
foreach(license LICENSE licenses/LICENSE-jsonhpp vendor/cpp-httplib/LICENSE)
  string(REGEX REPLACE "^LICENSE$" "llama.cpp" name "${license}")
  string(REGEX REPLACE "(licenses/LICENSE-|vendor/|/LICENSE)" "" name "${name}")
  if(EXISTS "${BMOE_LLAMA_SOURCE_DIR}/${license}")
    install(FILES "${BMOE_LLAMA_SOURCE_DIR}/${license}" DESTINATION "${license_directory}" RENAME "LICENSE.${name}")
  endif()
endforeach()

if(SKBUILD OR BMOE_PYTHON)
  # cffi reads the very header that C callers include; no declaration is typed twice.
  set(generator "${CMAKE_CURRENT_SOURCE_DIR}/cmake/cffi_module.py")
  set(declarations "${CMAKE_CURRENT_BINARY_DIR}/bmoe_cdef.h")
  set(module "${CMAKE_CURRENT_BINARY_DIR}/_bmoe_cffi.py")
  add_custom_command(
    OUTPUT "${module}"
    COMMAND "${CMAKE_C_COMPILER}" -E -P -DBMOE_CDEF "${header}" -o "${declarations}"
    COMMAND "${Python3_EXECUTABLE}" "${generator}" "${declarations}" "${module}"
    DEPENDS "${header}" "${generator}"
    VERBATIM)
  add_custom_target(bmoe_cffi ALL DEPENDS "${module}")
  install(FILES "${module}" DESTINATION bmoe_native)
endif()
