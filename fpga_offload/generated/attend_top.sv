// Generated from fpga_offload/description.py by `ssdkv lab docs write`; do not edit.
// Written to the documented interface, never run. Elaborated by Verilator.
// Bursts are incrementing. Their length says where they end.
`default_nettype none
module attend_top #(parameter D = 128, parameter G = 1) (
    input  wire         ap_clk,
    input  wire         ap_rst_n,
    output wire         interrupt,
    input  wire         s_axi_control_awvalid,
    output wire         s_axi_control_awready,
    input  wire [11:0]  s_axi_control_awaddr,
    input  wire         s_axi_control_wvalid,
    output wire         s_axi_control_wready,
    input  wire [31:0]  s_axi_control_wdata,
    input  wire [3:0]   s_axi_control_wstrb,
    output wire         s_axi_control_bvalid,
    input  wire         s_axi_control_bready,
    output wire [1:0]   s_axi_control_bresp,
    input  wire         s_axi_control_arvalid,
    output wire         s_axi_control_arready,
    input  wire [11:0]  s_axi_control_araddr,
    output wire         s_axi_control_rvalid,
    input  wire         s_axi_control_rready,
    output wire [31:0]  s_axi_control_rdata,
    output wire [1:0]   s_axi_control_rresp,
    output wire         m_axi_list_arvalid,
    input  wire         m_axi_list_arready,
    output wire [63:0]  m_axi_list_araddr,
    output wire [7:0]   m_axi_list_arlen,
    output wire [2:0]   m_axi_list_arsize,
    output wire [1:0]   m_axi_list_arburst,
    input  wire         m_axi_list_rvalid,
    output wire         m_axi_list_rready,
    input  wire [511:0] m_axi_list_rdata,
    input  wire [1:0]   m_axi_list_rresp,
    input  wire         m_axi_list_rlast,
    output wire         m_axi_page_arvalid,
    input  wire         m_axi_page_arready,
    output wire [63:0]  m_axi_page_araddr,
    output wire [7:0]   m_axi_page_arlen,
    output wire [2:0]   m_axi_page_arsize,
    output wire [1:0]   m_axi_page_arburst,
    input  wire         m_axi_page_rvalid,
    output wire         m_axi_page_rready,
    input  wire [511:0] m_axi_page_rdata,
    input  wire [1:0]   m_axi_page_rresp,
    input  wire         m_axi_page_rlast,
    output wire         m_axi_out_awvalid,
    input  wire         m_axi_out_awready,
    output wire [63:0]  m_axi_out_awaddr,
    output wire [7:0]   m_axi_out_awlen,
    output wire [2:0]   m_axi_out_awsize,
    output wire [1:0]   m_axi_out_awburst,
    output wire         m_axi_out_wvalid,
    input  wire         m_axi_out_wready,
    output wire [511:0] m_axi_out_wdata,
    output wire [63:0]  m_axi_out_wstrb,
    output wire         m_axi_out_wlast,
    input  wire         m_axi_out_bvalid,
    output wire         m_axi_out_bready,
    input  wire [1:0]   m_axi_out_bresp
);
    // Vitis resets low; the reset is registered once, for its fan-out.
    reg rst = 1'b1;
    always @(posedge ap_clk) rst <= !ap_rst_n;

    attend #(.D(D), .G(G)) kernel(
        .clk(ap_clk), .rst(rst), .interrupt(interrupt),
        .s_awvalid(s_axi_control_awvalid),
        .s_awready(s_axi_control_awready),
        .s_awaddr(s_axi_control_awaddr),
        .s_wvalid(s_axi_control_wvalid),
        .s_wready(s_axi_control_wready),
        .s_wdata(s_axi_control_wdata),
        .s_wstrb(s_axi_control_wstrb),
        .s_bvalid(s_axi_control_bvalid),
        .s_bready(s_axi_control_bready),
        .s_arvalid(s_axi_control_arvalid),
        .s_arready(s_axi_control_arready),
        .s_araddr(s_axi_control_araddr),
        .s_rvalid(s_axi_control_rvalid),
        .s_rready(s_axi_control_rready),
        .s_rdata(s_axi_control_rdata),
        .list_arvalid(m_axi_list_arvalid),
        .list_arready(m_axi_list_arready),
        .list_araddr(m_axi_list_araddr),
        .list_arlen(m_axi_list_arlen),
        .list_rvalid(m_axi_list_rvalid),
        .list_rready(m_axi_list_rready),
        .list_rdata(m_axi_list_rdata),
        .list_rresp(m_axi_list_rresp),
        .page_arvalid(m_axi_page_arvalid),
        .page_arready(m_axi_page_arready),
        .page_araddr(m_axi_page_araddr),
        .page_arlen(m_axi_page_arlen),
        .page_rvalid(m_axi_page_rvalid),
        .page_rready(m_axi_page_rready),
        .page_rdata(m_axi_page_rdata),
        .page_rresp(m_axi_page_rresp),
        .out_awvalid(m_axi_out_awvalid),
        .out_awready(m_axi_out_awready),
        .out_awaddr(m_axi_out_awaddr),
        .out_awlen(m_axi_out_awlen),
        .out_wvalid(m_axi_out_wvalid),
        .out_wready(m_axi_out_wready),
        .out_wdata(m_axi_out_wdata),
        .out_wstrb(m_axi_out_wstrb),
        .out_wlast(m_axi_out_wlast),
        .out_bvalid(m_axi_out_bvalid),
        .out_bready(m_axi_out_bready),
        .out_bresp(m_axi_out_bresp));

    assign s_axi_control_bresp = 2'b00;
    assign s_axi_control_rresp = 2'b00;
    assign m_axi_list_arsize = 3'd6;
    assign m_axi_list_arburst = 2'b01;
    assign m_axi_page_arsize = 3'd6;
    assign m_axi_page_arburst = 2'b01;
    assign m_axi_out_awsize = 3'd6;
    assign m_axi_out_awburst = 2'b01;
    wire unused = &{m_axi_list_rlast,
        m_axi_page_rlast};
endmodule
`default_nettype wire
