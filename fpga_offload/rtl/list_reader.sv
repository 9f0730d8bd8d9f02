// AXI4 read master for lists and queries: `beats` from `address` on at a time, in bursts of at most 16
// beats, none across 4 KiB. What comes is taken as it comes, so a burst is asked for with `room` only.
`default_nettype none
module list_reader (
    input  wire         clk,
    input  wire         rst,
    input  wire         start,
    input  wire [57:0]  address,          // in beats
    input  wire [15:0]  beats,
    input  wire         room,             // for 16 beats beside those on the way
    output wire         idle,
    output wire         out_valid,
    output wire [511:0] out_data,
    output reg          arvalid,
    input  wire         arready,
    output wire [63:0]  araddr,
    output reg  [7:0]   arlen,
    input  wire         rvalid,
    output wire         rready,
    input  wire [511:0] rdata
);
    reg [57:0] next, asked;
    reg [15:0] left;
    reg [4:0] coming;                     // of the one burst on the way
    wire [4:0] to_boundary = 5'd16 - {1'b0, next[3:0]};
    wire [4:0] burst = left < {11'd0, to_boundary} ? left[4:0] : to_boundary;
    assign idle = left == 0 && coming == 0 && !start;
    assign araddr = {asked, 6'd0};
    assign rready = 1'b1;
    assign out_valid = rvalid;
    assign out_data = rdata;
    always @(posedge clk)
        if (rst) begin
            arvalid <= 0;
            left <= 0;
            coming <= 0;
        end else begin
            if (arvalid && arready) arvalid <= 0;
            if (start) begin
                next <= address;
                left <= beats;
            end else if (left != 0 && coming == 0 && room) begin
                arvalid <= 1;
                asked <= next;
                arlen <= {3'd0, burst} - 8'd1;
                coming <= burst;
                next <= next + {53'd0, burst};
                left <= left - {11'd0, burst};
            end
            if (rvalid) coming <= coming - 5'd1;
        end
endmodule
`default_nettype wire
