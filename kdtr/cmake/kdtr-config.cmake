# find_package(kdtr CONFIG REQUIRED) finds the C++ headers and gives the interface target kdtr::kdtr. Configure with
#   cmake -Dkdtr_DIR="$(python -c 'import kdtr; print(kdtr.cmake_dir())')" ...
if(NOT TARGET kdtr::kdtr)
  get_filename_component(_kdtr_include "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
  add_library(kdtr::kdtr INTERFACE IMPORTED)
  set_target_properties(kdtr::kdtr PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_kdtr_include}"
                                              INTERFACE_COMPILE_FEATURES cxx_std_17)
  unset(_kdtr_include)
endif()
