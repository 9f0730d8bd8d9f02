// InstInfer's row filter: half pages pass by in beats, rows of their masks go on to the core, others are
// dropped as fast as they come.
//
// Descriptors of half pages: kind, last of its block, tokens, mask. A mask has a token, or the half is not the
// last of its block.
`default_nettype none
module row_filter #(parameter NB = 4, parameter CW = 10) (
    input  wire          clk,
    input  wire          rst,
    input  wire          descriptor_valid,
    input  wire [22:0]   descriptor,
    output wire          descriptor_taken,
    input  wire [CW-1:0] available,          // beats that wait
    output wire          pop,                // one of them
    output wire          first,              // of its half page
    output wire          row_valid,          // the row in front is of the mask, and whole
    output wire          row_is_value,
    output wire          row_last,           // of its block
    input  wire          row_beat,           // the core takes one
    output wire          idle
);
    localparam LNB = $clog2(NB);
    reg [22:0] now;
    reg now_valid;
    reg [3:0] token;
    reg [LNB-1:0] beat;
    wire [15:0] mask = now[15:0];
    wire keep = mask[token];
    wire [15:0] behind = mask & ~(16'hffff >> (4'd15 - token));
    wire drop = now_valid && !keep && available != 0;
    wire row_over = pop && beat == NB - 1;
    wire now_over = row_over && {1'b0, token} + 5'd1 == now[20:16];
    assign row_valid = now_valid && keep && beat == 0 && available >= NB;
    assign row_is_value = now[22];
    assign row_last = now[21] && behind == 0;
    assign pop = row_beat || drop;
    assign descriptor_taken = descriptor_valid && (!now_valid || now_over);
    assign first = token == 0 && beat == 0;
    assign idle = !now_valid;
    always @(posedge clk)
        if (rst) begin
            now_valid <= 0;
            token <= 0;
            beat <= 0;
        end else begin
            if (pop) beat <= beat + 1'b1;
            if (row_over) token <= token + 1'b1;
            if (now_over) begin
                token <= 0;
                now_valid <= 0;
            end
            if (descriptor_taken) begin
                now_valid <= 1;
                now <= descriptor;
            end
        end
endmodule
`default_nettype wire
