# Where things go: into the Python package when a wheel is built, else the usual lib/ and include/. Either can be moved.
if(SKBUILD)
  set(prefix_directory bmoe_native)
  set(library_directory bmoe_native)
  set(header_directory bmoe_native/include)
  set(license_directory bmoe_native/licenses)
  set(package_directory bmoe_native/cmake)
  set(pkgconfig_directory bmoe_native/pkgconfig)
else()
  include(GNUInstallDirs)
  set(prefix_directory .)
  set(library_directory "${CMAKE_INSTALL_LIBDIR}")
  set(header_directory "${CMAKE_INSTALL_INCLUDEDIR}")
  set(license_directory "${CMAKE_INSTALL_DOCDIR}")
  set(package_directory "${library_directory}/cmake/bmoe")
  set(pkgconfig_directory "${library_directory}/pkgconfig")
endif()
foreach(directory "${library_directory}" "${header_directory}")
  if(IS_ABSOLUTE "${directory}")
    message(FATAL_ERROR "${directory} is absolute: libraries and headers go below the prefix, so that it can be moved")
  endif()
endforeach()
install(FILES "${header}" DESTINATION "${header_directory}")

if(SKBUILD)
  # A wheel has no links: the library is there by its full name, and what -lbmoe finds sends the linker to it.
  install(TARGETS bmoe EXPORT bmoe LIBRARY DESTINATION "${library_directory}" NAMELINK_SKIP
    INCLUDES DESTINATION "${header_directory}")
  set(script "${CMAKE_CURRENT_BINARY_DIR}/link/libbmoe.so")
  file(WRITE "${script}" "/* To be loaded: libbmoe.so.${BMOE_ABI} */\nINPUT(libbmoe.so.${BMOE_ABI})\n")
  install(FILES "${script}" DESTINATION "${library_directory}")
else()
  install(TARGETS bmoe EXPORT bmoe LIBRARY DESTINATION "${library_directory}" INCLUDES DESTINATION "${header_directory}")
endif()

# find_package(bmoe) and pkg-config.
include(CMakePackageConfigHelpers)
set(package_version "${CMAKE_CURRENT_BINARY_DIR}/bmoeConfigVersion.cmake")
write_basic_package_version_file("${package_version}" COMPATIBILITY SameMinorVersion)
install(EXPORT bmoe FILE bmoeConfig.cmake NAMESPACE bmoe:: DESTINATION "${package_directory}")
install(FILES "${package_version}" DESTINATION "${package_directory}")
# pkg-config's paths, from where its file lies.
file(RELATIVE_PATH pc_to_prefix "/${pkgconfig_directory}" "/${prefix_directory}")
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
foreach(name library header)
  file(RELATIVE_PATH pc_${name} "/${prefix_directory}" "/${${name}_directory}")
  if(pc_${name})
    string(PREPEND pc_${name} "/")
  endif()
endforeach()
configure_file(cmake/bmoe.pc.in bmoe.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/bmoe.pc" DESTINATION "${pkgconfig_directory}")

# The library contains what these cover.
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
