# Generated from fpga_offload/description.py by `ssdkv lab docs write`; do not edit.
# Written to the documented interface, never run.
proc attend_registers {block} {
  set register [ipx::add_register CTRL $block]
  set_property address_offset 0x000 $register
  set_property size 32 $register
  set register [ipx::add_register GIER $block]
  set_property address_offset 0x004 $register
  set_property size 32 $register
  set register [ipx::add_register IP_IER $block]
  set_property address_offset 0x008 $register
  set_property size 32 $register
  set register [ipx::add_register IP_ISR $block]
  set_property address_offset 0x00c $register
  set_property size 32 $register
  set register [ipx::add_register q $block]
  set_property address_offset 0x010 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register pages $block]
  set_property address_offset 0x01c $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_page $parameter
  set register [ipx::add_register entries $block]
  set_property address_offset 0x028 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register jobs $block]
  set_property address_offset 0x034 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register out $block]
  set_property address_offset 0x040 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register digests $block]
  set_property address_offset 0x04c $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register status $block]
  set_property address_offset 0x058 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register job_count $block]
  set_property address_offset 0x064 $register
  set_property size 32 $register
  set register [ipx::add_register entry_count $block]
  set_property address_offset 0x06c $register
  set_property size 32 $register
  set register [ipx::add_register v_offset $block]
  set_property address_offset 0x074 $register
  set_property size 32 $register
  set register [ipx::add_register scale_log2e $block]
  set_property address_offset 0x07c $register
  set_property size 32 $register
  set register [ipx::add_register flags $block]
  set_property address_offset 0x084 $register
  set_property size 32 $register
}
proc sparf_registers {block} {
  set register [ipx::add_register CTRL $block]
  set_property address_offset 0x000 $register
  set_property size 32 $register
  set register [ipx::add_register GIER $block]
  set_property address_offset 0x004 $register
  set_property size 32 $register
  set register [ipx::add_register IP_IER $block]
  set_property address_offset 0x008 $register
  set_property size 32 $register
  set register [ipx::add_register IP_ISR $block]
  set_property address_offset 0x00c $register
  set_property size 32 $register
  set register [ipx::add_register q $block]
  set_property address_offset 0x010 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register pages $block]
  set_property address_offset 0x01c $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_page $parameter
  set register [ipx::add_register channel_pages $block]
  set_property address_offset 0x028 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_channel $parameter
  set register [ipx::add_register entries $block]
  set_property address_offset 0x034 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register jobs $block]
  set_property address_offset 0x040 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register channels $block]
  set_property address_offset 0x04c $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register mean_value $block]
  set_property address_offset 0x058 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_list $parameter
  set register [ipx::add_register out $block]
  set_property address_offset 0x064 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register masks $block]
  set_property address_offset 0x070 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register choices $block]
  set_property address_offset 0x07c $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register status $block]
  set_property address_offset 0x088 $register
  set_property size 64 $register
  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]
  set_property value m_axi_out $parameter
  set register [ipx::add_register job_count $block]
  set_property address_offset 0x094 $register
  set_property size 32 $register
  set register [ipx::add_register entry_count $block]
  set_property address_offset 0x09c $register
  set_property size 32 $register
  set register [ipx::add_register channel_count $block]
  set_property address_offset 0x0a4 $register
  set_property size 32 $register
  set register [ipx::add_register block_tokens $block]
  set_property address_offset 0x0ac $register
  set_property size 32 $register
  set register [ipx::add_register page_tokens $block]
  set_property address_offset 0x0b4 $register
  set_property size 32 $register
  set register [ipx::add_register keep_channels $block]
  set_property address_offset 0x0bc $register
  set_property size 32 $register
  set register [ipx::add_register channel_group $block]
  set_property address_offset 0x0c4 $register
  set_property size 32 $register
  set register [ipx::add_register sinks $block]
  set_property address_offset 0x0cc $register
  set_property size 32 $register
  set register [ipx::add_register v_offset $block]
  set_property address_offset 0x0d4 $register
  set_property size 32 $register
  set register [ipx::add_register scale $block]
  set_property address_offset 0x0dc $register
  set_property size 32 $register
  set register [ipx::add_register scale_log2e $block]
  set_property address_offset 0x0e4 $register
  set_property size 32 $register
  set register [ipx::add_register flags $block]
  set_property address_offset 0x0ec $register
  set_property size 32 $register
}
