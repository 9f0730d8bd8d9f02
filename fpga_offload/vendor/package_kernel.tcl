# Packs an RTL kernel as an .xo file. Written to the documented interface, never run.
# Arguments: fpga_offload/, zkf's Verilog, the output folder, the kernel, head size, query heads per
# KV head.
lassign $argv sources zkf out kernel head_size group

source [file join $sources generated registers.tcl]
set packaged [file join $out ${kernel}_ip]

create_project -force pack_$kernel [file join $out pack_$kernel]
add_files -norecurse $zkf
add_files -norecurse [file join $sources generated ssdkv_fpga.svh]
set_property file_type SystemVerilog [get_files ssdkv_fpga.svh]
add_files -norecurse [glob [file join $sources rtl *.sv]]
add_files -norecurse [file join $sources generated ${kernel}_top.sv]
set_property top ${kernel}_top [current_fileset]
set_property generic "D=$head_size G=$group" [current_fileset]
update_compile_order -fileset sources_1

ipx::package_project -root_dir $packaged -vendor ssdkv -library kernels -taxonomy /KernelIP \
  -import_files -set_current true
set core [ipx::current_core]
# Parameters are of this build, not of whoever links it.
foreach parameter [ipx::get_user_parameters -of_objects $core] {
  set_property value_resolve_type generated $parameter
}

foreach port [ipx::get_bus_interfaces *_axi_* -of_objects $core] {
  ipx::associate_bus_interfaces -busif [get_property NAME $port] -clock ap_clk $core
}
ipx::associate_bus_interfaces -clock ap_clk -reset ap_rst_n $core

set map [ipx::add_memory_map s_axi_control $core]
set block [ipx::add_address_block reg0 $map]
${kernel}_registers $block
set_property slave_memory_map_ref s_axi_control \
  [ipx::get_bus_interfaces s_axi_control -of_objects $core]

set_property sdx_kernel true $core
set_property sdx_kernel_type rtl $core
set_property supported_families {} $core
set_property auto_family_support_level level_2 $core
ipx::create_xgui_files $core
ipx::update_checksums $core
ipx::check_integrity -kernel -xrt $core
ipx::save_core $core

set xo [file join $out $kernel.xo]
file delete -force $xo
package_xo -xo_path $xo -kernel_name $kernel -ctrl_protocol ap_ctrl_hs -ip_directory $packaged
close_project
