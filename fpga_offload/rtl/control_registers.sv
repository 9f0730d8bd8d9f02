// AXI4-Lite registers as Vitis HLS lays them out: ap_ctrl_hs at 0x00, interrupts at 0x04 to 0x0C, the
// arguments from 0x10 on, as `words` of 32 bits from offset 0.
`default_nettype none
module control_registers #(parameter WORDS = 64) (
    input  wire                clk,
    input  wire                rst,
    input  wire                awvalid,
    output wire                awready,
    input  wire [11:0]         awaddr,
    input  wire                wvalid,
    output wire                wready,
    input  wire [31:0]         wdata,
    input  wire [3:0]          wstrb,
    output reg                 bvalid,
    input  wire                bready,
    input  wire                arvalid,
    output wire                arready,
    input  wire [11:0]         araddr,
    output reg                 rvalid,
    input  wire                rready,
    output reg  [31:0]         rdata,
    output reg  [32*WORDS-1:0] words,
    output reg                 start,          // pulse
    input  wire                done,           // pulse
    output wire                interrupt
);
    localparam LW = $clog2(WORDS);
    reg done_seen, running, interrupts_on;
    reg [1:0] enabled, raised;
    wire write = awvalid && wvalid && !bvalid;
    assign awready = write;
    assign wready = write;
    assign arready = arvalid && !rvalid;
    assign interrupt = interrupts_on && raised != 0;
    integer byte_lane;
    wire in_range = awaddr[11:2] < WORDS && awaddr[11:4] != 0;
    always @(posedge clk) begin
        start <= 0;
        if (rst) begin
            bvalid <= 0;
            rvalid <= 0;
            done_seen <= 0;
            running <= 0;
            interrupts_on <= 0;
            enabled <= 0;
            raised <= 0;
        end else begin
            if (write) bvalid <= 1;
            else if (bready) bvalid <= 0;
            if (write && awaddr == 12'h000 && wstrb[0] && wdata[0] && !running) begin
                start <= 1;
                running <= 1;
            end
            if (write && awaddr == 12'h004 && wstrb[0]) interrupts_on <= wdata[0];
            if (write && awaddr == 12'h008 && wstrb[0]) enabled <= wdata[1:0];
            if (write && awaddr == 12'h00c && wstrb[0]) raised <= raised ^ wdata[1:0];
            if (arready) begin
                rvalid <= 1;
                case (araddr)
                    12'h000: begin
                        rdata <= {28'd0, done_seen, !running, done_seen, running};
                        done_seen <= 0;
                    end
                    12'h004: rdata <= {31'd0, interrupts_on};
                    12'h008: rdata <= {30'd0, enabled};
                    12'h00c: rdata <= {30'd0, raised};
                    default: rdata <= araddr[11:2] < WORDS ? words[32*araddr[LW+1:2] +: 32] : 32'd0;
                endcase
            end else if (rready) rvalid <= 0;
            if (done) begin
                done_seen <= 1;
                running <= 0;
                raised <= raised | enabled;
            end
        end
        if (write && in_range)
            for (byte_lane = 0; byte_lane < 4; byte_lane = byte_lane + 1)
                if (wstrb[byte_lane]) words[32*awaddr[LW+1:2] + 8*byte_lane +: 8] <= wdata[8*byte_lane +: 8];
    end
endmodule
`default_nettype wire
