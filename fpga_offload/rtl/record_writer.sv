// AXI4 write master: a record of `beats` at `address` at a time. Bursts of at most 64 beats, none
// across 4 KiB, one on the way.
`default_nettype none
module record_writer (
    input  wire         clk,
    input  wire         rst,
    input  wire         start,
    input  wire [63:0]  address,          // a multiple of 64
    input  wire [15:0]  beats,            // at least 1
    output wire         idle,             // all of it is written, and the memory has said so
    input  wire         in_valid,
    output wire         in_ready,
    input  wire [511:0] in_data,
    input  wire [63:0]  in_strobe,        // bytes of it to write
    output reg          awvalid,
    input  wire         awready,
    output wire [63:0]  awaddr,
    output reg  [7:0]   awlen,
    output wire         wvalid,
    input  wire         wready,
    output wire [511:0] wdata,
    output wire [63:0]  wstrb,
    output wire         wlast,
    input  wire         bvalid,
    output wire         bready
);
    localparam [1:0] IDLE = 0, ASK = 1, DATA = 2, ANSWER = 3;
    reg [1:0] state;
    reg [57:0] next;
    reg [57:0] asked;
    reg [15:0] left;
    reg [6:0] burst_left;
    wire [6:0] to_boundary = 7'd64 - {1'b0, next[5:0]};
    wire [6:0] burst = left < {9'd0, to_boundary} ? left[6:0] : to_boundary;
    assign idle = state == IDLE && !start;
    assign awaddr = {asked, 6'd0};
    assign wvalid = state == DATA && in_valid;
    assign in_ready = state == DATA && wready;
    assign wdata = in_data;
    assign wstrb = in_strobe;
    assign wlast = burst_left == 1;
    assign bready = state == ANSWER;
    always @(posedge clk)
        if (rst) begin
            state <= IDLE;
            awvalid <= 0;
        end else case (state)
            IDLE: if (start) begin
                state <= ASK;
                next <= address[63:6];
                left <= beats;
            end
            ASK: if (!awvalid) begin
                awvalid <= 1;
                awlen <= {1'b0, burst} - 8'd1;
                asked <= next;
                burst_left <= burst;
                next <= next + {51'd0, burst};
                left <= left - {9'd0, burst};
            end else if (awready) begin
                awvalid <= 0;
                state <= DATA;
            end
            DATA: if (wvalid && wready) begin
                burst_left <= burst_left - 7'd1;
                if (wlast) state <= ANSWER;
            end
            default: if (bvalid) state <= left == 0 ? IDLE : ASK;
        endcase
endmodule
`default_nettype wire
